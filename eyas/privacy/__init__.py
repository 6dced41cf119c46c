"""Personal data and secrets in texts: found, and masked or replaced.

pii          the table of types, and what is done about each: a new type is an entry there
spelling     a text as patterns are matched to it
patterns, identifiers, attributes, secrets    find values by a pattern and a check
invented     makes values of the same form that belong to nobody
findings     where something was found; masking
passages     prose, and code
entities     names, addresses and places, from the probabilities of tagger
dlp          Google Cloud DLP
detector     Detector, LeakDetector
mentions     every place of the values found in a conversation
surrogates   one map of invented values per conversation
key          the secret key of hashes and surrogates
"""
