"""Between OpenAI's words and ours: pure functions and folds, with no server, no store and no clock.

bodies         what a request may say               answer    the events of a run, folded to what was said
conversation   a request as a conversation          chunks    … as `chat.completion` and its chunks
response       … as a `response` and its stream events
described      what is answered, for the description of the API
"""
