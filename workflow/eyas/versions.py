"""Format versions of the artefacts. They are params of the rules: raising one rebuilds that artefact
and what depends on it, while other changes of the code re-run nothing."""

VERSIONS = {
    "target": 1,
    "prompts": 1,
    "conversations": 1,
    "tokens": 1,
    "hidden_states": 1,
    "manifest": 1,
    "vocabulary": 1,
    "drafter": 1,
    "training": 2,
    "selection": 1,
    "evaluation": 1,
    "export": 1,
}
