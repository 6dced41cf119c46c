"""Agents on the clients that people write them with, each in a loop of three turns with tools.

    python tests/agent_clients.py URL MODEL [CLIENT ...]

needs `pip install --group clients`, and prints of each a line of JSON: the agent's steps and the
client's bodies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx

CITIES = ["Oslo", "Rome"]
WEATHER = {"Oslo": "rain, 7 degrees", "Rome": "sun, 21 degrees"}
QUESTION = "What is the weather in Oslo and in Rome? Look up each city."
Steps = list[dict[str, Any]]


class Bodies(list[dict[str, Any]]):
    """The bodies that a client sent, by a hook of its httpx client."""

    def client(self) -> httpx.Client:
        return httpx.Client(event_hooks={"request": [self._note]}, timeout=300)

    def _note(self, request: httpx.Request) -> None:
        self.append(json.loads(request.content))


def by_instructor(url: str, model: str, bodies: Bodies) -> Steps:
    import instructor  # noqa: PLC0415
    import openai  # noqa: PLC0415
    from pydantic import BaseModel, Field  # noqa: PLC0415

    class Weather(BaseModel):
        """Look up the weather of a city."""

        city: str = Field(max_length=20)
        degrees: int = Field(ge=-40, le=50)

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=bodies.client())
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": "Say where it is how warm: Oslo 7, Rome 21, Bonn 9."}]
    steps: Steps = []
    for _ in range(3):
        found, raw = client.chat.completions.create_with_completion(
            model=model, response_model=Weather, messages=messages, temperature=0, max_tokens=120
        )
        call = raw.choices[0].message
        steps.append({"called": "Weather", "arguments": found.model_dump()})
        messages.append(call.to_dict())
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "noted"}
        messages += [result, {"role": "user", "content": "And the next city?"}]
    return steps


def by_langgraph(url: str, model: str, bodies: Bodies) -> Steps:
    from langchain_core.tools import tool  # noqa: PLC0415
    from langchain_openai import ChatOpenAI  # noqa: PLC0415
    from langgraph.graph import END, START, MessagesState, StateGraph  # noqa: PLC0415
    from langgraph.prebuilt import ToolNode  # noqa: PLC0415

    @tool
    def weather(city: str) -> str:
        """Look up the weather of a city."""
        return WEATHER.get(city, "unknown")

    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=80,
        http_client=bodies.client(),
    )

    def think(state: MessagesState) -> dict[str, Any]:
        # the first two turns have to call
        num_results = sum(one.type == "tool" for one in state["messages"])
        choice = "required" if num_results < len(CITIES) else "auto"
        bound = chat.bind_tools([weather], tool_choice=choice)
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges(
        "think", lambda state: "tools" if state["messages"][-1].tool_calls else END, ["tools", END]
    )
    graph.add_edge("tools", "think")
    turns = graph.compile().invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 12})
    steps: Steps = []
    for turn in turns["messages"]:
        for call in getattr(turn, "tool_calls", []):
            steps.append({"called": call["name"], "arguments": call["args"]})
        if turn.type == "ai" and not turn.tool_calls:
            steps.append({"said": turn.content})
    return steps


def by_smolagents(url: str, model: str, bodies: Bodies) -> Steps:
    """It requires a call in every turn, its answer's too."""
    from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool  # noqa: PLC0415

    @tool
    def weather(city: str) -> str:
        """Look up the weather of a city.

        Args:
            city: the city's name

        """
        return WEATHER.get(city, "unknown")

    agent = ToolCallingAgent(
        tools=[weather],
        model=OpenAIServerModel(
            model,
            api_base=f"{url}/v1",
            api_key="none",
            client_kwargs={"http_client": bodies.client()},
            temperature=0,
            max_tokens=100,
        ),
        max_steps=3,
        verbosity_level=LogLevel.OFF,
    )
    agent.run(QUESTION)
    return [
        {"called": call.name, "arguments": call.arguments}
        for step in agent.memory.steps
        for call in getattr(step, "tool_calls", None) or []
    ]


CLIENTS: dict[str, Callable[[str, str, Bodies], Steps]] = {
    "instructor": by_instructor,
    "langgraph": by_langgraph,
    "smolagents": by_smolagents,
}

if __name__ == "__main__":
    url, model, *names = sys.argv[1:]
    for name in names or CLIENTS:
        bodies = Bodies()
        steps = CLIENTS[name](url, model, bodies)
        print(json.dumps({"client": name, "steps": steps, "bodies": bodies}), flush=True)
