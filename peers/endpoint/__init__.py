"""An endpoint for agents: the HTTP interface of OpenAI and of vLLM on one engine.

An agent harness that speaks to such an endpoint becomes an environment: what it is sent is sampled
from the policy, and recorded token by token. See docs/endpoint.md.

For other rooms, by the names in docs/rooms.md: `tools`
"""
