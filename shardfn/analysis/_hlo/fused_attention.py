"""FLOPs of cuDNN's attention in a compiled program.

In: a custom call. Out: two FLOPs per multiply-add of what the kernel computes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardfn._core.equation_flops import attention_multiply_adds
from shardfn.analysis._hlo.parse import Instruction, integers

_KERNEL = re.compile(r'custom_call_target="__cudnn\$fmha\w*"')
_BACKWARD = re.compile(r'custom_call_target="__cudnn\$fmha\w*Backward"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*{[^{}]*"dimensions":\s*\[([^]]*)')
_CAUSAL = re.compile(r'"mask_type":\s*"(?:PADDING_)?CAUSAL"')
_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')


def is_attention(instr: Instruction) -> bool:
    """Whether an instruction is a call of such a kernel."""
    return instr.opcode == "custom-call" and bool(_KERNEL.search(instr.attributes))


def attention_flops(instr: Instruction, operands: Sequence[tuple[int, ...]]) -> int:
    """The FLOPs of the kernel that an instruction calls.

    Args:
      instr: the call.
      operands: the shapes of its operands: query, key and value first.

    Returns:
      The number; 0 if the call does not say which scores it makes.
    """
    text = instr.attributes
    scores, window = _SCORES.search(text), _WINDOW.search(text)
    if scores is None:
        return 0
    rows, heads, queries, keys = integers(scores[1])
    each = attention_multiply_adds(
        queries,
        keys,
        (operands[0][-1], operands[2][-1]),
        causal=bool(_CAUSAL.search(text)),
        window=int(window[1]) if window else 0,
        backward=bool(_BACKWARD.search(text)),
    )
    return 2 * rows * heads * each
