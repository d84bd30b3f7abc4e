"""The prompt format: messages → text and token ids, the model's answer → reasoning, content and tool calls.

encode, encode_ids, pieces   messages to a prompt
parse, StreamParser          an answer, whole or as it comes
stop_ids                     what ends an answer beside the end token
sampling_defaults            what the model is meant to be sampled with
"""

from .encoding import encode, encode_ids, pieces, sampling_defaults, stop_ids
from .markup import EFFORTS
from .parsing import StreamParser, parse

__all__ = ["EFFORTS", "StreamParser", "encode", "encode_ids", "parse", "pieces", "sampling_defaults", "stop_ids"]
