"""Format versions of the artefacts. They are params of the rules: raising one rebuilds that artefact
and what depends on it, while other changes of the code re-run nothing."""

VERSIONS = {
    "target": 1,
    "prompts": 2,
    "conversations": 2,
    "tokens": 3,
    "hidden_states": 3,
    "manifest": 3,
    "statistics": 1,
    "vocabulary": 2,
    "drafter": 1,
    "training": 2,
    "selection": 1,
    "evaluation": 3,
    "export": 2,
    "card": 1,
    "report": 3,
}
