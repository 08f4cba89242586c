"""The HTTP endpoint through which external agents talk to the policy: the APIs of OpenAI and
Anthropic, token for token. Read `engines.vllm.chat.serving.Serving.answer` first, then
`replica_server.ReplicaServer` and `gateway.Gateway`."""
