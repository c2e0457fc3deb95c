"""Draw texts and values that may break their readers."""

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

_WORDS = r"""
- -- --help -o . .. / ~ * % %s%n {} {0.__class__} latest null true NaN -1 0x10 1e999 ${IFS} :// s3:/bucket/x
../../../etc/passwd /etc/passwd /dev/zero /proc/self/mem file:///etc/passwd C:\x @/etc/passwd --profile=x
s3:// s3:///x s3://a s3://b/../x s3://[::1/x s3://bucket/a?b#c s3://bucket/%00 s3://arn:aws:s3:::x/y S3://bucket/x
hf:// hf://../.. hf://a/b/c hf://a/b?split hf://a/b?config=&& hf://[x/y hf://a/b?x=y
data:// data://product/x data://../x data://[/x run:// run://x/../y run://- run://x/[y
http://169.254.169.254/ javascript:alert(1) {{7*7}} <script>alert(1)</script> %0d%0aX:y
"""

_YAML = r"""
*a !!str = << --- ... ? : - | >9 # ' " "\x "\ud800" "\U00110000" 1:60:61 0o9 0b2 0x .inf .nan -.inf 1e ~ y
190:20:30.15 2001-01-01T00:00:99Z !!python/name:os.system
"""


def texts(canary: Path) -> list[str]:
    """Return hostile texts. Texts that run as a command create the file `canary`."""
    touch = f"touch {canary}"
    return [
        *_WORDS.split(),
        *("", " ", "\t", "\n", "\0", "a\0b", "\ud800", "\udcff", "\ufeff", "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m"),
        *("\u202egnp.exe", "é" * 300, "🙂", "a" * 10_000, "a/" * 2000, "9" * 400, "s3://B U/x", f"s3://{'b' * 300}/x"),
        *(f"$({touch})", f"`{touch}`", f"; {touch};", f"| {touch}", f"&& {touch}", f"\n{touch}\n", f"'; {touch}; '"),
        *("__import__('os').system('id')", "' OR 1=1 --", f"$(python -c \"open('{canary}','w')\")"),
    ]


def values(canary: Path) -> SearchStrategy[object]:
    """Return a strategy of values of every type of YAML and JSON, most of them unsuitable."""
    odd: list[object] = [
        *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400),
        *(0.0, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
        *([], {}, [[]], [{}], {"": ""}, {"a": {"b": {"c": []}}}, ["x"] * 300, {"1": 1}, [None, 1, "x", {}]),
    ]
    drawn = (st.text(max_size=40), st.integers(), st.floats(), st.binary())
    return st.one_of(st.sampled_from(odd), st.sampled_from(texts(canary)), *drawn)


def snippets(canary: Path) -> list[str]:
    """Return pieces of YAML that go beyond plain values."""
    system = f'!!python/object/apply:os.system ["touch {canary}"]'
    return [
        *_YAML.split(),
        *(system, f"x: {system}", f"? {system}\n: 1", "&a [*a]", "<<: *a", "<<: [1, 2]", "&a &a x", "!!binary x"),
        *("!!set {a, b}", "!!timestamp 2020-13-45", "!!int 1_0_:5", "---\n---", "%YAML 9.9\n---", "%TAG ! x:\n---"),
        *("\t- x", "{" * 300, "[" * 300, "- " * 300, "a: " * 50, "\u2028", "\x85"),
    ]


@st.composite
def damaged(draw: DrawFn, content: bytes, pieces: list[str]) -> bytes:
    """Draw the content with parts removed, doubled, or replaced by one of the pieces."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from((0, 0, 1, 10, 100))))
        piece = draw(
            st.sampled_from([text.encode("utf-8", "surrogatepass") for text in pieces])
            | st.sampled_from((b"\xff", b"\0", b"\r", b"\xef\xbb\xbf", b"\xed\xa0\x80", content[start:end] * 2, b""))
            | st.binary(max_size=20)
        )
        content = content[:start] + piece + content[end:]
    return content
