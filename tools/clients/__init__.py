"""Drive clients of OpenAI's API, of several languages and frameworks, against a server with a scripted model."""
