"""Engine: the loaded model, ready to run rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from .comm import Single
from .config import ModelConfig, RunConfig
from .model import Model, Output
from .ops import open_ops
from .plan import MemoryPlan, check_plan, make_plan
from .rows import Rows
from .session import Session
from .state import Pool
from .step import Step

if TYPE_CHECKING:
    from .generate import Step as GeneratedStep
    from .sampling import SamplingParams
    from .tokenizer import Tokenizer

NANO = Path(__file__).parent / "models" / "nano"


def model_directory(name: str | Path) -> Path:
    """A checkpoint directory; "nano" is the embedded model."""
    return NANO if str(name) == "nano" else Path(name)


class Engine:
    """A checkpoint, a backend and the pool of sequences. Make one with Engine.load()."""

    def __init__(self, model: Model, pool: Pool, run: RunConfig, *, plan: MemoryPlan, identity: str, tokenizer=None):
        self.model, self.pool, self.run = model, pool, run
        self.config: ModelConfig = model.config
        self.plan, self.identity = plan, identity
        self.tokenizer: Tokenizer | None = tokenizer
        self.max_context, self.chunk = plan.max_context, run.chunk

    @classmethod
    def load(cls, path: str | Path = "nano", *, progress: Callable[[str, int, int], None] | None = None, **settings):
        """Load a checkpoint directory, or the embedded "nano".

        settings: fields of RunConfig (backend, threads, max_context, max_sessions, chunk, debug); what is not given
        comes from the environment, then from the defaults. progress(stage, done, total) while loading.
        Raises ConfigError, CheckpointError, CapacityError, BackendError.
        """
        import psutil

        from .checkpoint import Checkpoint
        from .tokenizer import Tokenizer
        from .weights import load_weights

        directory = model_directory(path)
        run = RunConfig.from_env(**settings)
        config = ModelConfig.load(directory)
        checkpoint = Checkpoint(directory)
        max_context = run.context(config)
        plan = make_plan(
            config,
            weights=checkpoint.total_bytes,
            max_context=max_context,
            max_sessions=run.max_sessions,
            headroom=run.chunk,
            available=psutil.virtual_memory().available,
        )
        check_plan(config, plan, run.chunk)
        tokenizer = Tokenizer.load(directory, config)
        ops = open_ops(run.backend, threads=run.threads)
        report = (lambda done, total: progress("load", done, total)) if progress else None
        weights = load_weights(checkpoint, config, ops, report)
        model = Model(config, weights, ops, Single(), run.debug)
        stages = len(weights.draft.stages) if weights.draft else 0
        pool = Pool(
            ops, config, slots=run.max_sessions, max_context=max_context, headroom=run.chunk, stages=stages
        )
        return cls(model, pool, run, plan=plan, identity=checkpoint.identity, tokenizer=tokenizer)

    def forward(self, rows: Rows) -> Output:
        """The only way tokens enter the model. Sessions call it; so may a scheduler that packs rows of several."""
        return self.model.forward(Step(self.model.ops, self.pool, rows), self.pool)

    def session(self) -> Session:
        """A new, empty sequence."""
        return Session(self)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, progress=None
    ) -> Iterator[GeneratedStep]:
        """Tokens and text of a continuation, as they come. prompt: text (needs a tokenizer) or token ids."""
        from .generate import stream
        from .sampling import SamplingParams

        return stream(self, prompt, params or SamplingParams(), progress)
