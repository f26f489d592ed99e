"""The same probes on Penstock and on its peers, judged by the invoice of a fake provider."""
