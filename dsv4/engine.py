"""Engine: the loaded model, ready to run rows."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from .comm import Communicator, Traffic, open_communicator
from .config import ModelConfig, RunConfig, World
from .crew import GRACE, Crew
from .dspark import Ask, Draft, Drafted
from .gate import Costs, GateSettings, MeasuredCosts
from .loading import load_model
from .model import Model, Output
from .plan import MemoryPlan
from .rows import Rows, Span
from .session import Session
from .state import Pool
from .step import Step

if TYPE_CHECKING:
    from .generate import Step as GeneratedStep
    from .sampling import SamplingParams
    from .scheduler import Scheduler
    from .tokenizer import Tokenizer

NANO = Path(__file__).parent / "models" / "nano"


def model_directory(name: str | Path) -> Path:
    """A checkpoint directory; "nano" is the embedded model."""
    return NANO if str(name) == "nano" else Path(name)


class Engine:
    """A checkpoint, a backend and the pool of sequences. Make one with Engine.load()."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        run: RunConfig,
        *,
        plan: MemoryPlan,
        gate: GateSettings,
        identity: str,
        tokenizer: Tokenizer | None,
        crew: Crew,
    ):
        self.model, self.pool, self.run, self.gate = model, pool, run, gate
        self.costs = MeasuredCosts(Costs.of(gate))  # of rounds on this machine, whichever sequence's
        has_draft = model.weights.draft is not None
        self.draft = Draft(model.config, model.weights, model.ops, model.comm, model.debug) if has_draft else None
        self.config: ModelConfig = model.config
        self.plan, self.identity = plan, identity
        self.tokenizer: Tokenizer | None = tokenizer
        self.max_context, self.chunk = plan.max_context, run.chunk
        self.crew = crew
        self.owner: Scheduler | None = None  # the one that runs on this engine; it ends first

    @classmethod
    def load(
        cls,
        path: str | Path = "nano",
        *,
        progress: Callable[[str, int, int], None] | None = None,
        gate: dict | None = None,
        comm: Communicator | None = None,
        **settings,
    ) -> Engine:
        """Load a checkpoint directory, or the embedded "nano".

        settings: fields of RunConfig (backend, threads, max_context, max_sessions, chunk, debug, expert_cache, packed);
        what is not given comes from the environment, then from the defaults. gate: fields of GateSettings, likewise.
        progress(stage, done, total) while loading, in bytes.
        Under mpirun every process calls this. Rank 0 gets the engine; in the others the call serves rank 0 until its
        engine is closed, and then raises SystemExit. comm: ranks that were started in some other way.
        Raises ConfigError, CheckpointError, CapacityError, BackendError.
        """
        engine = cls.join(path, progress=progress, gate=gate, comm=comm, **settings)
        if engine.crew.comm.rank:
            engine.crew.follow(engine)
            raise SystemExit(0)
        return engine

    @classmethod
    def join(cls, path: str | Path | None, *, progress=None, gate=None, comm=None, **settings) -> Engine:
        """One rank's engine, on any rank: load() up to where the others begin to follow. path None: rank 0's."""
        crew = Crew(comm or open_communicator(World.from_env()))
        with crew.together(GRACE):
            path, settings = crew.greet(path, settings)
            rules = GateSettings.from_env(**gate or {})  # a wrong value is refused before the load, which may take minutes
            engine = cls(**load_model(crew, model_directory(path), progress, settings), gate=rules)
            crew.ready()
        return engine

    def forward(self, rows: Rows) -> Output:
        """The only way tokens enter the model: for sessions, and for a scheduler that packs rows of several.

        Raises InputError for tokens, slots or positions that cannot be.
        """
        if not self.crew.comm.rank:
            self.pool.check(rows)
        with self.crew.command("forward", rows):
            return self.model.forward(Step(self.model.ops, self.pool, rows), self.pool)

    def prime(self, spans: Sequence[Span]) -> None:
        """Bring the draft's windows of some slots up to date: Draft.prime."""
        with self.crew.command("prime", spans):
            self.draft.prime(self.pool, spans)

    def draft_blocks(self, asks: Sequence[Ask]) -> list[Drafted | Exception] | None:
        """Drafted blocks, of one slot or several: Draft.draft."""
        told = [ask._replace(choose=None) for ask in asks] if self.crew.leads else ()
        with self.crew.command("draft_blocks", told):
            return self.draft.draft(self.pool, asks)

    @property
    def experts(self) -> dict | None:
        """experts.store.Counters of this rank since the load, as a dict. None where experts are not staged."""
        store = self.model.weights.store
        return asdict(store.counters) if store else None

    def traffic(self) -> list[Traffic]:
        """What every rank has sent so far, by rank."""
        with self.crew.command("traffic"):
            return self.crew.comm.everyone(replace(self.model.comm.traffic))

    def close(self) -> None:
        """End the scheduler, if one runs, and the other ranks. Closing twice is fine."""
        if self.owner is not None:
            self.owner.close()
        self.crew.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def session(self) -> Session:
        """A new, empty sequence. Raises CapacityError where `max_sessions` are open."""
        return Session(self)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, spec: str = "gate", progress=None
    ) -> Iterator[GeneratedStep]:
        """Tokens and text of a continuation, as they come. prompt: text (needs a tokenizer) or token ids.

        spec: off, always or gate, or a rule of the gate; it changes the speed and nothing else. progress(stage, done, total):
        tokens of the prompt. Raises InputError for a prompt or parameters that this engine cannot serve, ConfigError for
        another spec: at the call, before the first step.
        """
        from .generate import stream

        return stream(self, prompt, params, progress, spec)
