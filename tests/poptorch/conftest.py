"""Programs of PopTorch's tests are compiled quickly, for machines too, but in some files as podrun does."""

from tests.quick_programs import programs_of_machines_compile_quickly as programs_of_machines_compile_quickly
from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly
