"""A chat loop for `verifiers` tasksets that runs in the caller's process.

The loop of verifiers' own `null` harness (the model speaks, its tool calls are answered over MCP,
until it speaks without calling), without a Python process and an `uv` environment for each rollout.
It hands the model no code execution of its own.  What the model can't know to avoid (a tool that
doesn't exist, arguments that aren't JSON) is told to it, never raised.

Left out: compaction of long conversations, the tool gate of request hooks, and skills.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class ChatHarnessConfig(vf.HarnessConfig):
    """The fields that every harness has."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Stateless: one object plays any number of rollouts at a time."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Plays until the model ends its turn without a call.

        A model request that is refused ends the program with exit code 1, as it does other
        harnesses: verifiers then records why, or that a stop condition was met."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            offered, places, live = await connect_mcp({"mcpServers": servers}, stack)
            hidden = set(self.config.disabled_tools or ())
            tools = [tool for tool in offered if tool["function"]["name"] not in hidden]
            names = {tool["function"]["name"] for tool in tools}
            # Models take their time: the rollout's own deadline is the one that counts.
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools:
                body["tools"] = tools
            while True:
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                said = answer.json()["choices"][0]["message"]
                messages.append({k: v for k, v in said.items() if v is not None})
                if not said.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said["tool_calls"]:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    content = _refusal(name, arguments, names)
                    if content is None:
                        content = await call_mcp(live, places, name, json.loads(arguments or "{}"))
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


def _refusal(name: str, arguments: str, names: set[str]) -> str | None:
    """Why a call can't be made, for the model; None where it can."""
    if name not in names:
        return f"error: no tool named {name!r}; tools: {', '.join(sorted(names)) or 'none'}"
    try:
        value = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments aren't JSON ({error})"
    if not isinstance(value, dict):
        return "error: the arguments must be a JSON object"
    return None
