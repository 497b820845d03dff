"""Programs that tests of PopTorch compile themselves are compiled quickly."""

from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly
