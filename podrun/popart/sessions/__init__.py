"""Sessions: what programs call (`session`, `session_base`), checks of options against each other (`option_checks`),
their translation to the runtime's settings (`run_settings`), the IR, forward-only programs and instances of a launch.
"""
