"""The environment of a contained program: the gateway's addresses and a key of the gateway, and no provider's key.

Clients read different variables for the same thing, and some win over others: those that clients document are set, and
those that would win over them are removed. Variables with credentials of model providers are removed, and so is every
variable that contains a key of an upstream, whatever its name.

Knows names of variables, and nothing of processes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_REMOVED = frozenset(
    {
        *("OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID", "OPENAI_CUSTOM_HEADERS"),
        *("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_API_KEY", "AZURE_API_BASE"),
        *("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_CUSTOM_HEADERS"),
        *("ANTHROPIC_BEDROCK_BASE_URL", "ANTHROPIC_VERTEX_BASE_URL", "ANTHROPIC_FOUNDRY_BASE_URL"),
        *("ANTHROPIC_FOUNDRY_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
        *("CLAUDE_CODE_USE_FOUNDRY", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_GENAI_USE_VERTEXAI"),
        *("GOOGLE_GENAI_USE_ENTERPRISE", "GOOGLE_VERTEX_BASE_URL", "GOOGLE_GENERATIVE_AI_API_KEY"),
        *("VERTEXAI_PROJECT", "VERTEX_API_KEY", "CO_API_KEY", "COHERE_API_KEY", "MISTRAL_API_KEY", "CODESTRAL_API_KEY"),
        *("GROQ_API_KEY", "OPENROUTER_API_KEY", "DEEPSEEK_API_KEY", "XAI_API_KEY", "TOGETHER_API_KEY"),
        *("TOGETHERAI_API_KEY", "FIREWORKS_API_KEY", "PERPLEXITY_API_KEY", "PERPLEXITYAI_API_KEY", "CEREBRAS_API_KEY"),
        *("SAMBANOVA_API_KEY", "AI21_API_KEY", "VOYAGE_API_KEY", "JINA_API_KEY", "REPLICATE_API_TOKEN"),
        *("DEEPINFRA_API_KEY", "DEEPINFRA_TOKEN", "HYPERBOLIC_API_KEY", "NOVITA_API_KEY", "MOONSHOT_API_KEY"),
        *("MINIMAX_API_KEY", "ZAI_API_KEY", "ZHIPUAI_API_KEY", "DASHSCOPE_API_KEY", "NVIDIA_API_KEY"),
        *("NVIDIA_NIM_API_KEY", "HF_TOKEN", "HUGGINGFACE_API_KEY", "HUGGING_FACE_HUB_TOKEN", "OLLAMA_API_KEY"),
        *("WATSONX_API_KEY", "WATSONX_APIKEY", "DATABRICKS_TOKEN", "LITELLM_API_KEY", "LITELLM_MASTER_KEY"),
    }
)
"""Credentials of model providers, and variables that win over those that are set."""
_REMOVED_PREFIXES = ("AWS_",)
_LOOPBACK = ("127.0.0.1", "localhost")


def child_environment(
    environ: Mapping[str, str],
    url: str,
    key: str,
    codex_home: Path,
    *,
    secrets: Iterable[str] = (),
    kept: Collection[str] = (),
) -> dict[str, str]:
    """Return the environment of the program: `environ`, with the gateway at `url` in place of every provider.

    `secrets` are the keys of the upstreams; `kept` are variables that stay although they would be removed.
    """
    keys = [secret for secret in secrets if secret]
    passed = {
        name: value
        for name, value in environ.items()
        if (name in kept or not _is_removed(name)) and not any(secret in value for secret in keys)
    }
    return passed | _addresses(url) | _keys(key) | _no_proxy(environ) | {"CODEX_HOME": str(codex_home)}


def _is_removed(name: str) -> bool:
    plain = name.removesuffix("_FILE")
    return plain in _REMOVED or name.startswith(_REMOVED_PREFIXES) or (plain != name and plain in _keys(""))


def _addresses(url: str) -> dict[str, str]:
    openai = f"{url}/openai/v1"
    return {
        "PENSTOCK_GATEWAY_URL": url,
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,  # what LangChain and aider read
        "ANTHROPIC_BASE_URL": f"{url}/anthropic",
        "GOOGLE_GEMINI_BASE_URL": f"{url}/gemini",
        "GEMINI_API_BASE": f"{url}/gemini/v1beta",  # what LiteLLM reads, and it adds no version
    }


def _keys(key: str) -> dict[str, str]:
    names = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY")
    return dict.fromkeys((*names, "PENSTOCK_GATEWAY_KEY"), key)


def _no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep requests to the gateway away from a proxy of the network."""
    named = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = ",".join(dict.fromkeys([*filter(None, map(str.strip, named.split(","))), *_LOOPBACK]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def write_codex_home(folder: Path, url: str, key: str) -> None:
    """Write the configuration of codex, which reads neither the address nor, once logged in, the key from variables."""
    (folder / "config.toml").write_text(f"openai_base_url = {json.dumps(f'{url}/openai/v1')}\n", "utf-8")
    login = folder / "auth.json"
    login.touch(0o600)
    login.write_text(json.dumps({"OPENAI_API_KEY": key}), "utf-8")
