// Server-sent events of a fetch: the objects of all data lines, in order, until [DONE].

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

// What a refused request says: the message of OpenAI's error object, else the status.
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
