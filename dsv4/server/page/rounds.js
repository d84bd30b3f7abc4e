// A picture of speculation: a column per round, a cell per drafted token, the first at the bottom. The bar in a cell is
// the draft's confidence; outline and colour say whether the token was accepted, rejected, or not verified at all.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 20, HEIGHT = 9, STEP = 11, SHOWN = 200;

function shape(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

function fate(round, i) {
  return i < round.accepted ? "accepted" : i < round.verified ? "rejected" : "unverified";
}

function percent(confidence) {
  return Math.round(100 / (1 + Math.exp(-confidence)));
}

function cell(svg, y, kind, share) {
  shape("rect", { class: `bar ${kind}`, x: 1, y: y + 2, width: Math.max(1, (WIDTH - 2) * share / 100), height: HEIGHT - 4 }, svg);
  shape("rect", { class: `cell ${kind}`, x: .5, y: y + .5, width: WIDTH - 1, height: HEIGHT - 1, rx: 1.5 }, svg);
}

function column(round, number, rows) {
  const height = rows * STEP + 3;
  const svg = shape("svg", { width: WIDTH, height, "aria-hidden": "true" });
  const sure = round.confidence.map(percent);
  const words = `Round ${number}: ${round.drafted} drafted, ${round.verified} verified, ${round.accepted} accepted`;
  shape("title", {}, svg).textContent = sure.length ? `${words}; confidence ${sure.join("%, ")}%` : words;
  sure.forEach((share, i) => cell(svg, height - 3 - (i + 1) * STEP, fate(round, i), share));
  shape("line", { class: "ground", x1: 0, x2: WIDTH, y1: height - 1, y2: height - 1 }, svg);
  return svg;
}

function legend() {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const [kind, words] of [["accepted", "accepted"], ["rejected", "rejected"], ["unverified", "drafted, not verified"]]) {
    const item = document.createElement("li");
    const svg = shape("svg", { width: WIDTH, height: HEIGHT, "aria-hidden": "true" }, item);
    cell(svg, 0, kind, 70);
    item.append(words);
    list.append(item);
  }
  const item = document.createElement("li");
  item.append("bar: confidence; a line alone: nothing drafted");
  list.append(item);
  return list;
}

export class Rounds {
  constructor() {
    this.element = document.createElement("details");
    this.element.className = "rounds";
    this.element.open = true;
    this.element.hidden = true;
    this.summary = this.element.appendChild(document.createElement("summary"));
    this.picture = this.element.appendChild(document.createElement("div"));
    this.picture.className = "picture";
    this.picture.setAttribute("role", "img");
    this.element.append(legend());
    this.rows = 1;
    this.count = { rounds: 0, drafted: 0, verified: 0, accepted: 0 };
  }

  // Tokens that the rounds so far have settled: each its accepted ones and one more.
  get tokens() {
    return this.count.accepted + this.count.rounds;
  }

  add(rounds) {
    for (const round of rounds) {
      this.count.rounds += 1;
      for (const name of ["drafted", "verified", "accepted"]) this.count[name] += round[name];
      this.rows = Math.max(this.rows, round.drafted);
      this.picture.append(column(round, this.count.rounds, this.rows));
      if (this.picture.childElementCount > SHOWN) this.picture.firstElementChild.remove();
    }
    const { rounds: n, drafted, verified, accepted } = this.count;
    const rate = verified ? `, ${Math.round(100 * accepted / verified)}%` : "";
    const words = `${n} rounds: ${drafted} drafted, ${verified} verified, ${accepted} accepted${rate}`;
    this.summary.textContent = n > SHOWN ? `${words} (the last ${SHOWN} shown)` : words;
    this.picture.setAttribute("aria-label", words);
    this.element.hidden = n === 0;
  }
}
