import pytest

from jobs.core.credentials import login_in, without_logins


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("see https://me:word@a.example/x", "https://…@a.example"),
        ("git+https://word@a.example/x", "git+https://…@a.example"),
        ("mysql://me:word@a.example", "mysql://…@a.example"),
        ("https://a.example/x@v1 hf://org/name@main me@a.example ssh://git@a.example git+ssh://git@a.example/x", None),
        ("https://${TOKEN}@a.example https://me:${TOKEN}@a.example db://me:{parameters.word}@a.example", None),
    ],
)
def test_a_login_is_a_password_or_a_token_in_an_address(text: str, address: str | None) -> None:
    assert login_in(text) == address
    assert "word@" not in without_logins(text)
