"""Texts and values that were made to break whoever reads them."""

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def texts(canary: Path) -> list[str]:
    """Return texts for any place of text; those that could run as a command would make the file `canary`."""
    touch = f"touch {canary}"
    return [
        *("", " ", "\t", "\n", "-", "--", "--help", "-o", ".", "..", "/", "~", "*", "%", "%s%n", "{}", "{0.__class__}"),
        *(
            "latest",
            "null",
            "true",
            "NaN",
            "-1",
            "0x10",
            "1e999",
            "9" * 400,
            "\0",
            "a\0b",
            "\ud800",
            "\udcff",
            "\ufeff",
        ),
        *("\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\u202egnp.exe", "é" * 300, "🙂", "a" * 10_000, "a/" * 2000),
        *("../../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "file:///etc/passwd", "C:\\x"),
        *(
            "s3://",
            "s3:///x",
            "s3://a",
            "s3://b/../x",
            "s3://B U/x",
            f"s3://{'b' * 300}/x",
            "s3://b/\x7f",
            "s3://[::1/x",
        ),
        *("s3://bucket/a?b#c", "s3://bucket/%00", "s3://169.254.169.254/x", "s3://arn:aws:s3:::x/y", "S3://bucket/x"),
        *("hf://", "hf://../..", "hf://a/b/c", "hf://a/b?split", "hf://a/b?config=&&", "hf://[x/y", "hf://a/b?x=y"),
        *(
            "data://",
            "data://product/x",
            "data://../x",
            "data://[/x",
            "run://",
            "run://x/../y",
            "run://-",
            "run://x/[y",
        ),
        *("http://169.254.169.254/", "javascript:alert(1)", "ftp://x/y", "://", "s3:/bucket/x"),
        *(f"$({touch})", f"`{touch}`", f"; {touch};", f"| {touch}", f"&& {touch}", f"\n{touch}\n", f"'; {touch}; '"),
        *(f"$(python -c \"open('{canary}','w')\")", "${IFS}", "@/etc/passwd", "--profile=x", "--config=/etc/passwd"),
        *("__import__('os').system('id')", "{{7*7}}", "<script>alert(1)</script>", "' OR 1=1 --", "%0d%0aX: y"),
    ]


def values(canary: Path) -> SearchStrategy[object]:
    """Return a strategy of values of every type that YAML and JSON have, most of them out of place."""
    odd: list[object] = [
        *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**70, -(2**70), 10**18, 10**400),
        *(0.0, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 0.1 + 0.2),
        *([], {}, [[]], [{}], {"": ""}, {"a": {"b": {"c": []}}}, ["x"] * 300, {"1": 1}, [None, 1, "x", {}]),
    ]
    return st.one_of(
        st.sampled_from(odd),
        st.sampled_from(texts(canary)),
        st.text(max_size=40),
        st.integers(),
        st.floats(),
        st.binary(),
    )


def snippets(canary: Path) -> list[str]:
    """Return pieces of YAML that mean something to a reader that takes more than plain values."""
    system = f'!!python/object/apply:os.system ["touch {canary}"]'
    return [
        *(system, f"x: {system}", f"? {system}\n: 1", "!!python/name:os.system", "!!python/object/new:os.system []"),
        *("&a [*a]", "*a", "<<: *a", "<<: [1, 2]", "<<: 1", "&a &a x", "!!binary x", "!!set {a, b}", "!!omap [a: 1]"),
        *(
            "!!timestamp 2020-13-45",
            "!!int 1_0_:5",
            "!!float .",
            "!!bool maybe",
            "!!null x",
            "!x y",
            "!!str",
            "=",
            "<<",
        ),
        *(
            "---",
            "...",
            "---\n---",
            "%YAML 9.9\n---",
            "%TAG ! x:\n---",
            "\t",
            "\t- x",
            "? ",
            ": ",
            "- ",
            "|",
            ">9",
            "#",
        ),
        *(
            "{" * 300,
            "[" * 300,
            "- " * 300,
            "a: " * 50,
            "'",
            '"',
            '"\\x',
            '"\\ud800"',
            '"\\U00110000"',
            "\u2028",
            "\x85",
        ),
        *(
            "1:60:61",
            "0o9",
            "0b2",
            "0x",
            ".inf",
            ".nan",
            "-.inf",
            "1e",
            "~",
            "y",
            "2001-01-01T00:00:99Z",
            "190:20:30.15",
        ),
    ]
