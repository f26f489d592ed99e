"""Translation between OpenAI's formats and Penstock's: pure functions and folds, with no server, store or clock.

request     request schemas, and the conversation in a request     answer      a run's events, folded to its answer
response    the answer as a `response` and its stream events       chunks      the answer as a `chat.completion`
described   response schemas for the API description
"""
