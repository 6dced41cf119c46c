"""`eyas watch`: running servers -> tau by window beside the card's; whether the head is stale."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from eyas.bench.watch import WatchWindow, windows
from eyas.card import CardTau, read_card
from eyas.client import Client
from eyas.errors import MissingInputError
from eyas.hub import locate

STALE = 3  # exit code; 1 and 2 are errors
LEAST_REQUESTS = 30  # in a window, for a tau that is nearly normally distributed
POLL_S, TIMEOUT_S = 5.0, 30.0


def command(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="servers: eyas, vLLM, SGLang")
    ],
    head: Annotated[
        str,
        typer.Option(
            help="the head's card: the output of `eyas eval`, or of `eyas export` with an "
            "evaluation, or a name of a head"
        ),
    ],
    requests: Annotated[
        int, typer.Option(min=LEAST_REQUESTS, help="answers of a window, on all servers together")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(help="of the card's figures: the one that most requests have")
    ] = 0.0,
    once: Annotated[
        bool, typer.Option("--once", help="end after one window, with 3 if the head is stale")
    ] = False,
) -> None:
    """Compare servers' counters at /metrics with a head's card, window by window, until stopped.

    A head is stale if tau is lower than the card's by more than a tenth of the accepted drafts and
    by more than 3.09 standard errors.
    """
    figures = read_card(head if Path(head).exists() else locate(head))
    window = asyncio.run(_watch(urls, figures, temperature, requests, once))
    found = asdict(window)
    del found["card"]["acceptance_by_position"]
    facts = {"stale": window.is_stale, "tau_interval": window.interval}
    print(json.dumps({**facts, "least_tau": window.least_tau, **found}, allow_nan=False))
    raise typer.Exit(STALE if window.is_stale else 0)


async def _watch(
    urls: Sequence[str],
    figures: Sequence[CardTau],
    temperature: float,
    requests: int,
    once: bool,
) -> WatchWindow:
    was_stale = False
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client(url, TIMEOUT_S)) for url in dict.fromkeys(urls)
        ]
        async for window in windows(clients, figures, temperature, requests, POLL_S):
            text = window if isinstance(window, str) else _line(window)
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}", flush=True)
            if isinstance(window, str):
                if once:
                    raise MissingInputError(window, "send traffic, or give a smaller --requests")
                continue
            if window.is_stale and not was_stale:
                print(f"  -> {_advice(window)}", flush=True)
            if once:
                return window
            was_stale = window.is_stale
    raise AssertionError("windows have no end")


def _line(window: WatchWindow) -> str:
    card = window.card
    parts = [
        f"{'STALE' if window.is_stale else 'ok':<5}  tau {_tau(window)}, card {_tau(card)}, stale "
        f"below {window.least_tau:.2f}",
        f"{window.num_requests:,} requests, {window.num_rounds:,} rounds of {card.speculation}",
    ]
    if window.acceptance_by_position:
        parts.append(f"acceptance by position {_shares(window)}, card {_shares(card)}")
    parts += [f"{url} restarted" for url in window.restarted]
    parts += [f"no answer from {url} for a while" for url in window.lost]
    return "; ".join(parts)


def _tau(one: WatchWindow | CardTau) -> str:
    return f"{one.tau:.2f} ({one.interval[0]:.2f}-{one.interval[1]:.2f})"


def _shares(one: WatchWindow | CardTau) -> str:
    return " ".join(f"{share:.2f}" for share in one.acceptance_by_position)


def _advice(window: WatchWindow) -> str:
    lost = (window.card.tau - window.tau) / (window.card.tau - 1)
    return (
        f"the head lost {lost:.0%} of its accepted drafts: this traffic is not what it was "
        "measured on (`eyas run runs/refresh.yaml` makes a new head from the servers' logs), or "
        "the served target is not the one it was trained for (`eyas check HEAD --target TARGET`)"
    )
