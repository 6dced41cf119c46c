"""Personal data and secrets in texts: found, and masked or replaced. Knows texts, neither rows nor
models.

    policy       types, what is done about each, findings, masking
    detector     Detector, LeakDetector; loads Presidio
    spelling     a text as patterns are matched to it
    patterns, identifiers, attributes, secrets    find values by a pattern and a check
    entities     names, addresses and places: lexicon (words) -> tagger (probabilities) -> entities
    cloud        Google Cloud DLP
    mentions     every place of the values found in a conversation; names and their genders
    surrogates   invented values in place of real ones
    key          the secret key of hashes and surrogates
"""
