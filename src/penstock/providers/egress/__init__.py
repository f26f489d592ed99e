"""HTTP client for requests to untrusted addresses: those written by a model, a graph or a redirect.

Imports no HTTP library until the first request.
"""

from penstock.providers.egress.client import EgressClient, EgressResponse
from penstock.providers.egress.failures import EgressDenied, EgressError, EgressFailed
from penstock.providers.egress.policy import EgressPolicy

__all__ = ["EgressClient", "EgressDenied", "EgressError", "EgressFailed", "EgressPolicy", "EgressResponse"]
