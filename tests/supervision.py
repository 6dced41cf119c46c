"""The mask options: which tokens a head learns to draft, given which tokens the target wrote. Pure
functions over lists.

Slot t of a head takes the feature of x_t and the token x_{t+1}, and drafts x_{t+2}. Three sets of
slots are in use; here each is shown by the tokens drafted, s = t + 2.

    tokens     [u  :  a1 a2 a3 e  n  u ]   a1 a2 a3 e: written by the target
    mask       [0  0  1  1  1  1  0  0 ]
    serving    [.  .  .  a2 a3 e  .  . ]   mask[t+1] and mask[t+2]: what a head drafts when serving
    t          [.  .  .  .  a3 e  n  u ]   EAGLE, SpecForge: the first draft of an answer is missed
    t+1        [.  .  .  a2 a3 e  n  . ]   NeMo, speculators: one token more than the target wrote

The first token of an answer is never drafted: the target's prefill gives it.
"""

from __future__ import annotations

from typing import Literal, get_args

MaskOption = Literal["serving", "t", "t+1"]
OPTIONS: tuple[MaskOption, ...] = get_args(MaskOption)


def supervised(mask: list[bool], option: MaskOption) -> list[bool]:
    """[T], true on the tokens that a head is trained to draft. mask [T]: the tokens that the target
    wrote.
    """
    before, before_that = [False, *mask][: len(mask)], [False, False, *mask][: len(mask)]
    if option == "t":
        return before_that
    can_be_drafted = [position >= 2 for position in range(len(mask))]
    if option == "t+1":
        return [one and can for one, can in zip(before, can_be_drafted, strict=True)]
    return [one and own and can for one, own, can in zip(before, mask, can_be_drafted, strict=True)]
