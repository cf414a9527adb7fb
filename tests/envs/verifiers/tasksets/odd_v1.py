"""Tasksets that can't be trained on, and a harness that does what `task.prompt` says."""

import httpx
import verifiers.v1 as vf


class OddConfig(vf.TasksetConfig):
    prompt: str = ""


class OddTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        return 1 / (0 if self.data.prompt == "divide" else 1)


class OddTaskset(vf.Taskset[OddTask, OddConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield OddTask(vf.TaskData(prompt=self.config.prompt), self.config.task)


class OddHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        route, said = "chat/completions", [{"role": "user", "content": data.prompt}]
        if data.prompt == "responses":
            route = "responses"
        async with httpx.AsyncClient(timeout=None) as client:
            for _ in range(2 if data.prompt == "rewrite" else 1):
                body = {"model": ctx.model, "messages": said, "input": "hello"}
                answer = await client.post(
                    f"{endpoint}/{route}", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                said = [{"role": "user", "content": "another start"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OddHarness", "OddTaskset"]
