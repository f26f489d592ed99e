# curl, over the APIs of OpenAI, Anthropic and Google.
set -eu
chat() {
  curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d "{\"model\": \"$1\", \"max_tokens\": 20, \"stream\": $3, \
    \"messages\": [{\"role\": \"user\", \"content\": \"$2\"}]}"
}
chat fake-1 hello false | grep -o '"content": "[^"]*"'
chat fake-1 hello true | grep -c '^data: '
chat fake-1 wrong false > /dev/null && exit 1 || echo "error of the provider"
curl -sS --fail-with-body "$ANTHROPIC_BASE_URL/v1/messages" -H "x-api-key: $ANTHROPIC_API_KEY" \
  -H "anthropic-version: 2023-06-01" -H "Content-Type: application/json" \
  -d '{"model": "fake-1", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}' | grep -o '"text": "[^"]*"'
curl -sS --fail-with-body "$GOOGLE_GEMINI_BASE_URL/v1beta/models/fake-1:generateContent" \
  -H "x-goog-api-key: $GOOGLE_API_KEY" -H "Content-Type: application/json" \
  -d '{"contents": [{"parts": [{"text": "hello"}]}]}' | grep -o '"text": "[^"]*"'
curl -sS --compressed --fail-with-body "$OPENAI_BASE_URL/models" -H "Authorization: Bearer $OPENAI_API_KEY" | grep -o fake-1
if [ -n "${PENSTOCK_GATEWAY_URL:-}" ]; then
  test "$(chat dear-1 hello false 2> /dev/null | grep -c budget_exceeded)" = 1
fi
