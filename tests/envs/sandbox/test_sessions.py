"""Sessions from the host's side: state, isolation, bindings, lives and deaths."""

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.sandbox import Result, Sandbox, SandboxBusy, SandboxConfig, SandboxUnavailable
from envs.sandbox.session import NO_OUTPUT
from envs.workbook import CellError
from tests.processes import children, running

ROOT = Path(__file__).parents[3]


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come about"
        time.sleep(0.01)


def test_state_lives_within_a_session_and_nowhere_else(sandbox):
    with sandbox.session() as one, sandbox.session() as other:
        one.run("import math\nmath.leaked = 1\nx = 41")
        assert one.run("print(x + 1)").output == "42\n"
        assert "NameError" in other.run("print(x)").error
        assert other.run("import math\nprint(hasattr(math, 'leaked'))").output == "False\n"
    with sandbox.session() as third:
        assert "NameError" in third.run("print(x)").error


def test_output_is_what_was_printed(session):
    assert session.run("print('a')\nprint('b', end='')").output == "a\nb"
    assert session.run("1 + 1").output == NO_OUTPUT
    assert session.run("import sys\nprint('err', file=sys.stderr)").output == "err\n"
    result = session.run("print('before')\n1 / 0")
    assert result.output == "before\n"
    assert result.text == "before\n  line 2: 1 / 0\nZeroDivisionError: division by zero"


def test_output_is_cut_with_a_note(session):
    result = session.run("print('ab' * 10_000)")
    assert result.output.startswith("abab")
    assert result.output.endswith("\n... cut: 10,000 of 20,001 characters shown; print less")


def test_errors_show_the_codes_own_lines(session):
    session.run("def total(rows):\n    return sum(row['x'] for row in rows)")
    error = session.run("import statistics\n\ntotal([{}])").error
    assert error.splitlines() == [
        "  line 3: total([{}])",
        "  call 1, line 2, in total: return sum(row['x'] for row in rows)",
        "  call 1, line 2, in <genexpr>: return sum(row['x'] for row in rows)",
        "KeyError: 'x'",
    ]
    error = session.run("statistics.mean([])").error
    assert error.splitlines()[0] == "  line 1: statistics.mean([])"
    assert "statistics.py" not in error
    error = session.run("x = 1\nif x\n    pass").error
    assert error == "  line 2: if x\nSyntaxError: expected ':'"
    session.bind("Cap Table", 1, 1, [["a", "b"], [1, 2]])
    assert session.run("Orders").error.endswith("names from reads: cells, Cap_Table")


def test_bound_values_keep_their_types(session):
    values = [
        None, True, 7, 7.0, 2.5, -(10**15), "text", "007", "", "\ud800", "#N/A",
        datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 23, 59, 58, 7),
        datetime.time(1, 2, 3), datetime.timedelta(days=-1, seconds=5, microseconds=3),
        CellError("#N/A"), CellError("#DIV/0!"),
    ]  # fmt: skip
    session.bind("Sheet", 4, 2, [values])
    result = session.run(
        "row = [v for (r, c), v in sorted(cells['Sheet'].items())]\n"
        "print([type(v).__name__ for v in row])\nprint(row)\n"
        "print(sorted(cells['Sheet'])[0], row[10] == row[15], row[10] != row[15])"
    )
    kinds, row, rest = result.output.splitlines()
    assert kinds == repr([type(v).__name__ for v in values])
    assert row == repr(values)
    assert rest == "(4, 2) False True"


def test_bindings_grow_and_survive_a_death(session):
    session.bind("Orders", 1, 1, [["Order", "Net USD"], ["O-1", 5]])
    assert session.run("print(Orders[0].Net_USD, len(Orders))").output == "5 1\n"
    session.bind("Orders", 3, 1, [["O-2", 6]])
    session.bind("Other", 1, 1, [[datetime.date(2024, 1, 1)]])
    assert session.run("print(sum(r.Net_USD for r in Orders), Other[0].A)").output == (
        "11 2024-01-01\n"
    )
    assert session.run("import os\nos._exit(1)").state_lost
    result = session.run("print([r._row for r in Orders], cells['Other'])")
    assert result.output.splitlines()[1] == "[2, 3] {(1, 1): datetime.date(2024, 1, 1)}"


@pytest.mark.parametrize("value", [object(), [1], {"date": "2024-01-01"}, b"x", 1j])
def test_values_that_no_cell_holds_are_refused(session, value):
    with pytest.raises(TypeError, match="cells hold None, bool"):
        session.bind("S", 1, 1, [[value]])
    with pytest.raises(ValueError, match="start at 1"):
        session.bind("S", 0, 1, [[1]])


def test_modules_and_late_imports(session):
    code = """
    import calendar, collections, csv, datetime, decimal, fractions, hashlib, heapq, io
    import itertools, json, math, operator, pprint, random, re, statistics, string, textwrap
    import dataclasses, enum, typing, zoneinfo, zlib, uuid, unicodedata, urllib.parse
    from collections import Counter, defaultdict
    from decimal import Decimal

    @dataclasses.dataclass
    class Point:
        x: int = 1

    print(datetime.datetime.strptime("2024-01-31", "%Y-%m-%d").date(), Point())
    print("ü".encode("cp1252"), "\\N{EURO SIGN}", hashlib.sha256(b"").hexdigest()[:4])
    print(statistics.median([1, 2, 3]), list(csv.reader(io.StringIO("a,b")))[0])
    print(Decimal("0.10") * 3, fractions.Fraction("1/3"), calendar.month_name[2])
    """
    result = session.run(textwrap.dedent(code))
    assert result.error is None
    assert result.output.splitlines() == [
        "2024-01-31 Point(x=1)",
        "b'\\xfc' € e3b0",
        "2 ['a', 'b']",
        "0.30 1/3 February",
    ]
    assert "no module 'numpy' here" in session.run("import numpy").error


def test_equal_seeds_give_equal_runs(sandbox):
    code = "import random\nprint(random.random(), hash('a'), list({'x', 'y', 'z', 'w'}))"
    with Sandbox() as second:
        outputs = []
        for place, seed in ((sandbox, 5), (sandbox, 5), (second, 5), (sandbox, 6)):
            with place.session(seed=seed) as session:
                outputs.append(session.run(code).output)
    assert outputs[0] == outputs[1] == outputs[2] != outputs[3]
    assert outputs[0].split(" ", 1)[1] == outputs[3].split(" ", 1)[1]


def test_printed_addresses_do_not_tell_processes_apart(sandbox):
    code = "print((x for x in []), [object()])\nraise ValueError(object())"
    with Sandbox() as other, sandbox.session() as one, other.session() as two:
        first, second = one.run(code), two.run(code)
    assert first == second
    assert first.output.count(" at 0x7f") == 2 and " at 0x7f" in first.error


def test_bad_calls(sandbox):
    with sandbox.session() as session:
        with pytest.raises(TypeError, match="code must be a text"):
            session.run(b"1")
        assert "the limit is 100,000" in session.run("x" * 100_001).error
        assert "null bytes" in session.run("x = 1\0").error
        assert session.run("\ud800").error is not None
        assert session.run("print(1)").output == "1\n"
    with pytest.raises(ValueError, match="session is closed"):
        session.run("1")


@pytest.mark.parametrize(
    "fields",
    [
        {"soft_seconds": 0}, {"soft_seconds": 5, "hard_seconds": 5}, {"memory_mb": 10},
        {"spares": -1}, {"cpu_seconds": 0}, {"output_chars": 0}, {"max_live": 0},
        {"start_seconds": -1},
    ],
)  # fmt: skip
def test_config_is_checked(fields):
    with pytest.raises(ValueError, match="must"):
        SandboxConfig(**fields)


def test_children_end_with_their_session_and_leave_no_zombie(sandbox):
    pids = []
    for _ in range(20):
        session = sandbox.session()
        session.run("x = 1")
        pids.append(session.pid)
        session.close()
    stuck = sandbox.session()
    stuck.run("import os\nos._exit(1)")
    eventually(lambda: not any(map(running, pids)))
    stuck.close()
    eventually(lambda: all(map(running, children(sandbox.pid))))
    assert len(set(pids)) == 20


def test_live_sessions_are_limited_and_idle_ones_are_free():
    with Sandbox(SandboxConfig(max_live=2)) as own:
        sessions = [own.session() for _ in range(3)]  # none holds a process yet
        sessions[0].run("x = 1")
        sessions[1].run("x = 1")
        assert own.live == 2
        with pytest.raises(SandboxBusy, match="max_live"):
            sessions[2].run("x = 1")
        sessions[0].close()
        assert sessions[2].run("print(1)").output == "1\n"
        assert own.live == 2


def test_zygote_death_is_survived():
    with Sandbox() as own:
        fresh, used = own.session(), own.session()
        used.bind("S", 1, 1, [["a", "b"], [1, 2]])
        used.run("x = 1")
        first, child = own.pid, used.pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not running(child))  # bound to the zygote's life
        result = used.run("print(S[0].b, 'x' in globals())")
        assert result.output.endswith("2 False\n") and result.state_lost
        assert result.error is None and "restarted" in result.output
        assert own.pid != first
        result = fresh.run("print(1)")  # nothing to lose, so nothing was lost
        assert result == Result("1\n")
        assert {layer.name for layer in own.layers} >= {"seccomp", "self-test"}


def test_zygote_death_in_mid_call_is_not_the_codes_fault():
    with Sandbox(SandboxConfig(soft_seconds=5, hard_seconds=10)) as own:
        session = own.session()
        killer = threading.Timer(0.3, os.kill, (own.pid, signal.SIGKILL))
        killer.start()
        result = session.run("import time\ntime.sleep(1)\nprint('done')")
        killer.join()
        assert (result.output, result.error, result.state_lost) == ("done\n", None, False)


def test_dead_spares_are_replaced_and_no_call_is_blamed():
    with Sandbox(SandboxConfig(spares=3)) as own:
        eventually(lambda: len(children(own.pid)) >= 3)
        for spare in children(own.pid):
            os.kill(spare, signal.SIGKILL)
        sessions = [own.session() for _ in range(5)]
        assert [s.run("print(1)") for s in sessions] == [Result("1\n")] * 5
        assert own.live == 5
        eventually(lambda: len(children(own.pid)) == 8)
    with Sandbox(SandboxConfig(spares=0)) as own, own.session() as session:
        assert session.run("print(1)") == Result("1\n")
        assert children(own.pid) == [session.pid]


def test_a_zygote_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr("envs.sandbox.host._CONTROL_SECONDS", 0.5)
    with Sandbox() as own, own.session() as session:
        first = own.pid
        os.kill(first, signal.SIGSTOP)
        assert session.run("print(1)") == Result("1\n")
        assert own.pid != first and not running(first)


def test_a_stopped_child_is_killed_and_replaced(sandbox, session):
    session.run("x = 1")
    os.kill(session.pid, signal.SIGSTOP)
    result = session.run("print(x)")
    assert result.timed_out and result.state_lost
    assert session.run("print(2)").output.endswith("2\n")


def test_a_child_killed_between_calls_is_replaced(sandbox, session):
    session.run("x = 1")
    pid = session.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not running(pid))
    result = session.run("print(2)")
    assert result.output.endswith("gain)\n2\n") and result.error is None and result.state_lost
    assert session.run("print(3)") == Result("3\n")


def test_the_zygote_ends_with_its_host():
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from envs.sandbox import Sandbox
own = Sandbox()
session = own.session()
session.run("x = 1")
print(own.pid, session.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as host:
        zygote, child = map(int, host.stdout.readline().split())
        assert running(zygote) and running(child)
        host.kill()
    eventually(lambda: not running(zygote) and not running(child))


def test_many_threads_one_sandbox(sandbox):
    def work(number: int) -> list[str]:
        with sandbox.session(seed=number) as session:
            session.bind("S", 1, 1, [["n", "m"], [number, 0]])
            return [session.run(f"print(S[0].n + {k})").output for k in range(5)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(24)))
    assert found == [[f"{n + k}\n" for k in range(5)] for n in range(24)]


def test_sandbox_made_in_a_thread_outlives_the_thread():
    with ThreadPoolExecutor(1) as threads:
        own = threads.submit(Sandbox).result()
    time.sleep(0.05)
    with own, own.session() as session:
        assert session.run("print(1)") == Result("1\n")


def test_a_closed_sandbox_says_so():
    own = Sandbox()
    session = own.session()
    zygote = own.pid
    session.run("x = 1")
    own.close()
    own.close()
    assert not running(zygote)
    with pytest.raises(ValueError, match="closed"):
        own.session()
    with pytest.raises((ValueError, SandboxUnavailable), match="closed"):
        session.run("1")
    session.close()


def test_no_jax_and_a_light_import():
    code = "import sys, envs.sandbox\nprint({'jax', 'numpy', 'ctypes'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
