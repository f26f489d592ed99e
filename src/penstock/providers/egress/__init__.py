"""One client for every outgoing address that somebody else may have written: a model, a graph, a redirect.

Imports no HTTP library; that happens with the first request.
"""

from penstock.providers.egress.client import EgressClient, EgressResponse
from penstock.providers.egress.failures import EgressDenied, EgressError, EgressFailed
from penstock.providers.egress.policy import EgressPolicy

__all__ = ["EgressClient", "EgressDenied", "EgressError", "EgressFailed", "EgressPolicy", "EgressResponse"]
