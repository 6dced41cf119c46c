"""The engine: requests in, tokens out, at the target's own distribution.

engine      Engine and its settings: requests in, updates out
request     what goes in and comes out: SamplingParams, Request, Update, Result
scheduler   which samples run next, and the state of each; prefill: how prompts share a chunk;
            pages: the cache's pages
rounds      a job's work: prefill, or one round of propose -> verify -> extend
drafters    who proposes: the head, and text; draft: the head on its target
tree        which nodes are verified
verify      the exact walk down a verified tree
sampling    from logits to tokens; grammar: JSON schemas and regular expressions; stop
policy      how much to speculate, by acceptance (counts) and costs (a table of this machine)
"""
