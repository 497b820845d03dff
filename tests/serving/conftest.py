"""Programs of these tests are compiled quickly, for machines too."""

from tests.quick_programs import programs_of_machines_compile_quickly as programs_of_machines_compile_quickly
from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly
