"""Rules: pure functions from facts and a need to findings, one module per area. CHECKS lists what a module can ask."""
