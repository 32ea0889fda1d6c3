"""Ten agents made with the libraries that people use: `python clients.py NAME` plays a task.

It runs under a Python of its own (`make test-agents`). As any program of the environment `harness`
it finds the task in the file that SWARM_TASK names, the model at OPENAI_BASE_URL, and posts the
reward: whether the agent's last answer is the task's. There it is given the word `in-a-run`, since
the run's manifest decides the temperature."""


# mypy: ignore-errors

import asyncio
import json
import os
import sys
from pathlib import Path

MODEL = os.environ.get("SWARM_MODEL", "policy")
BASE = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
SYSTEM = "you add numbers with the tool."
IN_A_RUN = "in-a-run" in sys.argv[2:]
WARMTH = {} if IN_A_RUN else {"temperature": 0.02}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def openai(question: str) -> str:
    """The client itself, in a loop, with streams."""
    from openai import OpenAI

    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    client = OpenAI()
    for _ in range(3):
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools, **WARMTH
        ) as stream:
            said = stream.get_final_completion().choices[0].message
        messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in said.tool_calls or []:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            break
    return said.content


def openai_agents(question: str) -> str:
    """By /v1/responses."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(
        name="adder",
        instructions=SYSTEM,
        model=MODEL,
        model_settings=ModelSettings(**WARMTH),
        tools=[function_tool(add)],
    )
    return Runner.run_sync(agent, question, max_turns=3).final_output


def langgraph(question: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL, **WARMTH), [add], prompt=SYSTEM)
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].content


def smolagents(question: str) -> str:
    from smolagents import ActionStep, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(MODEL, api_base=BASE, api_key=KEY, tool_choice="auto", **WARMTH)
    agent = ToolCallingAgent([tool(add)], model, max_steps=1)
    agent.prompt_templates["system_prompt"] = SYSTEM  # its own has 4,000 tokens of the tiny policy
    if IN_A_RUN:  # its second request would write the conversation anew
        steps = agent.run(question, stream=True)
        return f"{next(each for each in steps if isinstance(each, ActionStep)).observations}."
    return str(agent.run(question))


def pydantic_ai(question: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(MODEL), system_prompt=SYSTEM, tools=[add], model_settings=WARMTH)
    return agent.run_sync(question).output


def autogen(question: str) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    about = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    about |= {"function_calling": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE, api_key=KEY, model_info=about, **WARMTH
    )
    agent = AssistantAgent(
        "adder", client, tools=[add], system_message=SYSTEM, max_tool_iterations=3
    )
    return asyncio.run(agent.run(task=question)).messages[-1].content


def ag2(question: str) -> str:
    """By /v1/responses."""
    from ag2 import Agent, tool
    from ag2.config import OpenAIResponsesConfig

    config = OpenAIResponsesConfig(MODEL, base_url=BASE, api_key=KEY, **WARMTH)

    async def play() -> str:
        reply = await Agent("adder", SYSTEM, config=config, tools=[tool(add)]).ask(question)
        return await reply.content()

    return asyncio.run(play())


def agent_framework(question: str) -> str:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(MODEL, base_url=BASE, api_key=KEY)
    agent = Agent(client, SYSTEM, tools=[add], default_options=WARMTH)
    return asyncio.run(agent.run(question)).text


def haystack(question: str) -> str:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    model = OpenAIChatGenerator(model=MODEL, api_base_url=BASE, generation_kwargs=WARMTH)
    agent = Agent(
        chat_generator=model, tools=[create_tool_from_function(add)], system_prompt=SYSTEM
    )
    return agent.run(messages=[ChatMessage.from_user(question)])["messages"][-1].text


def agno(question: str) -> str:
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    model = OpenAIChat(id=MODEL, base_url=BASE, api_key=KEY, **WARMTH)
    return (
        Agent(model=model, tools=[add], instructions=SYSTEM, telemetry=False).run(question).content
    )


AGENTS = {
    play.__name__: play
    for play in (
        *(openai, openai_agents, langgraph, smolagents, pydantic_ai),
        *(autogen, ag2, agent_framework, haystack, agno),
    )
}


if __name__ == "__main__":
    from openai import OpenAI

    task = json.loads(Path(os.environ["SWARM_TASK"]).read_text())
    found = AGENTS[sys.argv[1]](task["question"]).strip()
    print(found)
    session = BASE.rstrip("/").split("/")[-2]
    OpenAI().post(
        f"/rollouts/{session}/reward",
        body={"reward": float(found == task["answer"])},
        cast_to=object,
    )
