"""What every request passes, in this order, before a route sees it.

envelope   a request id, security headers, metrics; a fault becomes a plain 500      origin   Host, Origin, header sizes
gate       who asks, and whether the route's role is enough                           bodies   size, time, type, JSON

Plain ASGI, each around the next. None of them knows what the routes do.
"""
