"""What a machine would make of a model: memory by part, tokens per second, and what bounds them. A prediction, from sizes.

machine.py   what the machine is said to have, and what share of it a program gets
sizes.py     bytes of a model, by what reads them
predict.py   the cost model
render.py    the answer as text
"""

from .machine import Machine, parse_gpus
from .predict import predict
from .render import render
from .sizes import Sizes

__all__ = ["Machine", "Sizes", "parse_gpus", "predict", "render"]
