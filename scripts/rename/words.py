"""Banned words of language.md section 2 and redesign.md 4.1, as parts of identifiers."""
# word (one part of an identifier, lower case) -> the field's word(s)
BANNED = {
    "behind": "after", "beside": "next to", "border": "boundary", "borders": "boundaries",
    "further": "mtp", "depth": "mtp layer", "depths": "mtp layers", "predicting": "mtp",
    "letter": "mode, symbol, code", "letters": "modes, symbols, codes",
    "latent": "mla", "latents": "mla", "sparse": "dsa",
    "words": "vocabulary, rows, text", "word": "vocabulary, entry, text",
    "room": "headroom", "rooms": "headroom", "law": "in-flight limit", "laws": "limits",
    "window": "in-flight", "seam": "patch point", "seams": "patch points", "mend": "fix", "mended": "fixed", "mends": "fixes",
    "sabotage": "fault injection", "sabotages": "fault injections", "judge": "oracle, check", "judges": "oracle", "judged": "checked",
    "figures": "coefficients", "figure": "coefficient",
    "told": "", "found": "", "made": "", "mine": "", "ours": "", "given": "", "whole": "full, single, unsplit",
    "own": "", "others": "", "said": "", "theirs": "", "somebody": "", "anybody": "", "nobody": "no rank", "everybody": "",
    "spread": "sharded", "share": "shard, fraction", "shares": "shards", "skeleton": "op template", "skeletons": "op templates",
    "deal": "assign", "deals": "assigns", "dealt": "assigned", "plain": "reference", "house": "package", "floor": "layer", "floors": "layers",
    "tower": "package", "towers": "packages", "spoke": "initialised", "spoken": "initialised", "speak": "", "speaks": "",
    "ends": "embedding and LM head", "end": "", "early": "fused", "kept": "cached, saved", "keeps": "caches", "again": "recomputed",
    "inputs": "tokens", "odds": "probabilities", "there": "causal mask", "picked": "gathered", "among": "", "teaches": "",
    "lean": "", "bare": "", "bins": "", "ramp": "", "persist": "", "trim": "", "each": "", "one": "", "ones": "", "what": "",
    "so": "", "asked": "", "wanted": "", "host": "", "unlike": "", "alike": "", "anew": "", "afresh": "", "learnt": "", "foretold": "predicted", "foretells": "predicts",
}
