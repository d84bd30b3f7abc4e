"""Engine: the loaded model, ready to run rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from .comm import Single
from .config import ModelConfig, RunConfig
from .dspark import Draft
from .gate import Costs, GateSettings, MeasuredCosts
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

    def __init__(
        self, model: Model, pool: Pool, run: RunConfig, *, plan: MemoryPlan, gate: GateSettings, identity: str, tokenizer
    ):
        self.model, self.pool, self.run, self.gate = model, pool, run, gate
        self.costs = MeasuredCosts(Costs.of(gate))  # of rounds on this machine, whichever sequence's
        has_draft = model.weights.draft is not None
        self.draft = Draft(model.config, model.weights, model.ops, model.comm, model.debug) if has_draft else None
        self.config: ModelConfig = model.config
        self.plan, self.identity = plan, identity
        self.tokenizer: Tokenizer | None = tokenizer
        self.max_context, self.chunk = plan.max_context, run.chunk

    @classmethod
    def load(
        cls,
        path: str | Path = "nano",
        *,
        progress: Callable[[str, int, int], None] | None = None,
        gate: dict | None = None,
        **settings,
    ) -> Engine:
        """Load a checkpoint directory, or the embedded "nano".

        settings: fields of RunConfig (backend, threads, max_context, max_sessions, chunk, debug); what is not given
        comes from the environment, then from the defaults. gate: fields of GateSettings, likewise.
        progress(stage, done, total) while loading.
        Raises ConfigError, CheckpointError, CapacityError, BackendError.
        """
        import psutil

        from .checkpoint import Checkpoint
        from .tokenizer import Tokenizer
        from .weights import check, load_weights

        directory = model_directory(path)
        run = RunConfig.from_env(**settings)
        gate = GateSettings.from_env(**gate or {})
        config = ModelConfig.load(directory)
        checkpoint = Checkpoint(directory)
        stages = len(check(checkpoint, config).stages)
        # A block and its committed token are one forward, whatever the chunk.
        headroom = max(run.chunk, 1 + config.dspark.block_size) if stages else run.chunk
        plan_for = partial(
            make_plan,
            config,
            weights=checkpoint.total_bytes,
            max_sessions=run.max_sessions,
            headroom=headroom,
            available=psutil.virtual_memory().available,
            stages=stages,
        )
        plan = plan_for(max_context=run.context(config))
        check_plan(plan, lambda context: plan_for(max_context=context))
        tokenizer = Tokenizer.load(directory, config)
        ops = open_ops(run.backend, threads=run.threads)
        report = (lambda done, total: progress("load", done, total)) if progress else None
        model = Model(config, load_weights(checkpoint, config, ops, report), ops, Single(), run.debug)
        pool = Pool(
            ops, config, slots=run.max_sessions, max_context=plan.max_context, headroom=headroom, stages=stages
        )
        return cls(model, pool, run, plan=plan, gate=gate, identity=checkpoint.identity, tokenizer=tokenizer)

    def forward(self, rows: Rows) -> Output:
        """The only way tokens enter the model. Sessions call it; so may a scheduler that packs rows of several."""
        return self.model.forward(Step(self.model.ops, self.pool, rows), self.pool)

    def session(self) -> Session:
        """A new, empty sequence."""
        return Session(self)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, spec: str = "gate", progress=None
    ) -> Iterator[GeneratedStep]:
        """Tokens and text of a continuation, as they come. prompt: text (needs a tokenizer) or token ids.

        spec: off, always or gate, or a rule of the gate; it changes the speed and nothing else.
        """
        from .generate import stream

        return stream(self, prompt, params, progress, spec)
