"""Model calls over HTTP: the request, the response, and the containment checks between the two."""
