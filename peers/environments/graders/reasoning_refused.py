"""Data sets of reasoning-gym 0.1.25 that the environment refuses, with the reason.

All 106 were tried: two processes must draw the same ten tasks, a task's own answer must earn 1, and
neither junk nor the answer of another task may.
"""

REFUSED: dict[str, str] = {
    "ab": "one of its tasks has no answer that could be checked",
    "boxnet": "one of its tasks has no answer that could be checked",
    "complex_arithmetic": "the text 'nan' earns 1",
    "composite": "a mixture is made by naming several data sets",
    "game_of_life_halting": "the text 'junk' earns 1",
    "graph_color": "one of its tasks has no answer that could be checked",
    "intermediate_integration": "its own answer '2*(9*x - 3)**(3/2) + C' does not earn 1",
    "propositional_logic": "one of its tasks has no answer that could be checked",
    "puzzle24": "the answer of another task earns 1",
    "rubiks_cube": "one of its tasks has no answer that could be checked",
    "rush_hour": "one of its tasks has no answer that could be checked",
}
