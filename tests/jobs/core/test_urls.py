import pytest

from jobs.core.errors import ConfigurationError
from jobs.core.urls import check_endpoints, login_in, without_logins


@pytest.mark.parametrize(
    "address", ["https://batch.eu-west-1.amazonaws.com", "http://127.0.0.1:1/x", "http://[::1]:1", ""]
)
def test_valid_endpoint_is_accepted(address: str) -> None:
    check_endpoints({"AWS_ENDPOINT_URL": address, "AWS_ENDPOINT_URL_S3": address, "HOME": "[not an address"})


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "localhost:1", "http://:4566", "http://a:99999", "http://a:0", "http://-a.b", "file:///x"],
)
def test_invalid_endpoint_is_rejected_with_its_variable(address: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_endpoints({"AWS_ENDPOINT_URL_S3": address})
    assert f"AWS_ENDPOINT_URL_S3={address} is not an HTTP URL" in str(error.value)
    assert error.value.next_step is not None


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
def test_login_is_a_password_or_token_in_a_url(text: str, address: str | None) -> None:
    assert login_in(text) == address
    assert "word@" not in without_logins(text)
