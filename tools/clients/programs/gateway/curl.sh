# curl, over the APIs of OpenAI, Anthropic and Google.
set -eu
chat() { # MODEL MESSAGE [MORE_FIELDS [OPTIONS]]
  curl -sS --max-time 2 ${4:-} --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" \
    -d "{\"model\": \"$1\", \"max_tokens\": 20, \"messages\": [{\"role\": \"user\", \"content\": \"$2\"}]${3:-}}"
}
shown() { # LABEL PATTERN: fails if the pattern is not in the answer
  found=$(grep -o "$2") && echo "$1: $found"
}
TEXT='"text": "[^"]*"'
TOOLS=', "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
FORMAT=', "response_format": {"type": "json_object"}'
chat fake-1 hello | shown chat '"content": "[^"]*"'
echo "chat, streamed: $(chat fake-1 hello ', "stream": true' | grep -c '^data: ')"
chat fake-1 weather "$TOOLS" | shown tools '"name": "weather"'
chat fake-1 json "$FORMAT" | shown "structured output" 'Rome'
chat fake-1 wrong > /dev/null && exit 1 || echo "error of the provider"
chat fake-1 hang ', "stream": true' > /dev/null 2>&1 && exit 1 || test $? = 28
echo "disconnect"
chat fake-1 busy "" "--retry 3 --max-time 20" 2> /dev/null | grep -o '"finish_reason": "stop"' | sed 's/^/retries: /'
curl -sS --fail-with-body "$OPENAI_BASE_URL/embeddings" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -H "Content-Type: application/json" -d '{"model": "fake-1", "input": "a"}' | shown embeddings '"object": "embedding"'
curl -sS --fail-with-body "$ANTHROPIC_BASE_URL/v1/messages" -H "x-api-key: $ANTHROPIC_API_KEY" \
  -H "anthropic-version: 2023-06-01" -H "Content-Type: application/json" \
  -d '{"model": "fake-1", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}' | shown messages "$TEXT"
curl -sS --fail-with-body "$GOOGLE_GEMINI_BASE_URL/v1beta/models/fake-1:generateContent" \
  -H "x-goog-api-key: $GOOGLE_API_KEY" -H "Content-Type: application/json" \
  -d '{"contents": [{"parts": [{"text": "hello"}]}]}' | shown generateContent "$TEXT"
curl -sS --compressed --fail-with-body "$OPENAI_BASE_URL/models" -H "Authorization: Bearer $OPENAI_API_KEY" | shown models fake-1
if [ -n "${PENSTOCK_GATEWAY_URL:-}" ]; then
  test "$(chat dear-1 hello 2> /dev/null | grep -c budget_exceeded)" = 1
fi
