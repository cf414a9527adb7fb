"""A small taskset as others write them: a prompt, a tool server for all rollouts, a rubric."""

import verifiers.v1 as vf

BALANCES = {"cash": 120, "stock": 45, "debt": 300}


class LedgerState(vf.State):
    asked: list[str] = []


class BookTools(vf.Toolset[vf.SharedToolsetConfig, LedgerState]):
    TOOL_PREFIX = None

    @vf.tool
    async def read_ranges(self, ranges: list[str], show: int | None = None) -> str:
        """Lists the accounts."""
        return ", ".join(BALANCES)

    @vf.tool
    async def balance(self, account: str) -> str:
        """The balance of one account."""
        self.state.asked = [*self.state.asked, account]
        return str(BALANCES[account])


class LedgerData(vf.TaskData):
    account: str


class LedgerTask(vf.Task[LedgerData, LedgerState]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == f"ANSWER: {BALANCES[self.data.account]}")

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1 / max(trace.num_turns, 1)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.state.asked))


class LedgerConfig(vf.TasksetConfig):
    count: int = 6
    system: str = "Answer from the workbook."


class LedgerTaskset(vf.Taskset[LedgerTask, LedgerConfig]):
    @classmethod
    def toolsets(cls, config):
        return [BookTools(vf.SharedToolsetConfig())]

    def load(self):
        accounts = list(BALANCES)
        for n in range(self.config.count):
            account = accounts[n % len(accounts)]
            yield LedgerTask(
                LedgerData(
                    id=f"{account}-{n}", account=account, system_prompt=self.config.system,
                    prompt=f"What is the balance of {account}?\nSheets: Accounts",
                ),
                self.config.task,
            )  # fmt: skip


__all__ = ["LedgerTaskset"]

if __name__ == "__main__":
    BookTools.run()
