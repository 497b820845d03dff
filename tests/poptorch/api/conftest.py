"""Programs of these tests are compiled quickly for machines too, but in ``test_optimizers.py`` as podrun does."""

from tests.quick_programs import programs_of_machines_compile_quickly as programs_of_machines_compile_quickly
