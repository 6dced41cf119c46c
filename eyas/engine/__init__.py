"""The engine: requests in, tokens out, at the target's own distribution. Knows no HTTP.

engine      Engine and its settings: requests, the normal and the overlapped loop
request     what goes in and comes out: SamplingParams, Request, Update, Result
scheduler   which samples run next, and the state of each; pages: the cache's pages
rounds      the device's work: prefill, and rounds of propose -> verify -> extend
draft       the head for inference, and how it grows trees; tree: which nodes are verified
verify      the exact walk down a verified tree
sampling    from logits to tokens; grammar: JSON schemas and regular expressions; stop
policy      how much to speculate; steps: its arithmetic; acceptance, costs, outlook: what it knows
cuda        rounds that need not wait for the host
"""
