"""What these tests compute with JAX themselves is compiled quickly."""

from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly
