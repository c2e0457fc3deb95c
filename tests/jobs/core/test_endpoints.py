import pytest

from jobs.core.endpoints import check_endpoints
from jobs.core.errors import ConfigurationError


@pytest.mark.parametrize(
    "address", ["https://batch.eu-west-1.amazonaws.com", "http://127.0.0.1:1/x", "http://[::1]:1", ""]
)
def test_an_address_that_requests_can_be_sent_to_is_taken(address: str) -> None:
    check_endpoints({"AWS_ENDPOINT_URL": address, "AWS_ENDPOINT_URL_S3": address, "HOME": "[not an address"})


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "localhost:1", "http://:4566", "http://a:99999", "http://a:0", "http://-a.b", "file:///x"],
)
def test_any_other_is_refused_by_the_name_of_its_variable(address: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_endpoints({"AWS_ENDPOINT_URL_S3": address})
    assert f"AWS_ENDPOINT_URL_S3={address} is not an HTTP address" in str(error.value)
    assert error.value.next_step is not None
