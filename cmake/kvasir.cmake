# The few rules every folder's CMakeLists.txt uses.
#   kvasir_library(core SOURCES a.cc b.cc LINK x y)   one static library a folder
#   kvasir_test(core_status SOURCES status_test.cc LINK kvasir_core)
#   kvasir_bench(attention SOURCES bench.cc LINK kvasir_attention)
#   kvasir_fuzz(gguf SOURCES gguf_fuzz.cc LINK kvasir_model)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2")  # asserts (KVASIR_CHECK) stay on; hot files ask for -O3 themselves

find_program(KVASIR_CCACHE ccache)
if(KVASIR_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${KVASIR_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${KVASIR_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${KVASIR_CCACHE})
endif()

add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)
# Floating point means what it says: no contraction the source did not ask for, so that
# results are the same bytes for every batch and thread count.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# What hot files ask for. Fuzzed parsers only link the kernels, whose instrumented build would take most of the time.
set(KVASIR_HOT -O3)
if(KVASIR_SANITIZE)
  set(KVASIR_HOT -O1)
elseif(KVASIR_FUZZ)
  set(KVASIR_HOT -O1 -fno-sanitize=all)
endif()

if(KVASIR_SANITIZE STREQUAL "asan")
  # Null, alignment and vptr checks, one at every member access, would double the compile time; the address
  # sanitizer sees the first, and the fuzzers (which build with all of UBSan) the second where it matters.
  set(CMAKE_CXX_FLAGS_RELEASE "-O1")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=null,alignment,vptr -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(KVASIR_FUZZ)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1")
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined)
elseif(KVASIR_SANITIZE STREQUAL "tsan")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
endif()

# The binary carries its C++ runtime, so that it starts on machines with an older or no libstdc++.
# (The sanitizers' own runtimes want the shared one.)
if(NOT KVASIR_SANITIZE AND NOT KVASIR_FUZZ)
  add_link_options(-static-libstdc++ -static-libgcc)
endif()
find_program(KVASIR_MOLD mold)
if(KVASIR_MOLD AND NOT KVASIR_FUZZ)
  add_link_options(-fuse-ld=mold)
endif()

find_package(Threads REQUIRED)
include_directories(${CMAKE_SOURCE_DIR})

function(kvasir_library NAME)
  cmake_parse_arguments(A "" "" "SOURCES;LINK" ${ARGN})
  if(A_SOURCES)
    add_library(kvasir_${NAME} STATIC ${A_SOURCES})
    target_link_libraries(kvasir_${NAME} PUBLIC ${A_LINK})
  else()
    add_library(kvasir_${NAME} INTERFACE)
    target_link_libraries(kvasir_${NAME} INTERFACE ${A_LINK})
  endif()
endfunction()

# A test is one executable and one ctest entry; its label is its folder, so `./test core` finds it.
function(kvasir_test NAME)
  cmake_parse_arguments(A "" "TIMEOUT" "SOURCES;LINK;ARGS;LABEL" ${ARGN})
  if(A_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kvasir_test(${NAME}): nothing takes '${A_UNPARSED_ARGUMENTS}'")
  endif()
  add_executable(${NAME}_test ${A_SOURCES})
  target_link_libraries(${NAME}_test PRIVATE ${A_LINK} GTest::gtest GTest::gmock GTest::gtest_main)
  add_test(NAME ${NAME} COMMAND ${NAME}_test ${A_ARGS})
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  if(NOT A_LABEL)
    set(A_LABEL ${folder})
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 900)  # ends what hangs: the longest take 160 s on two busy processors, with and without a sanitizer
  endif()
  foreach(label ${A_LABEL})  # what `./test LABEL` builds
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${NAME}_test)
  endforeach()
  set_tests_properties(${NAME} PROPERTIES LABELS "${A_LABEL}" TIMEOUT ${A_TIMEOUT}
                       WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
endfunction()

function(kvasir_bench NAME)
  cmake_parse_arguments(A "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${NAME}_bench ${A_SOURCES})
  target_link_libraries(${NAME}_bench PRIVATE ${A_LINK})
endfunction()

function(kvasir_fuzz NAME)
  cmake_parse_arguments(A "" "" "SOURCES;LINK" ${ARGN})
  if(NOT KVASIR_FUZZ)
    return()
  endif()
  add_executable(${NAME}_fuzz ${A_SOURCES})
  set_property(GLOBAL APPEND PROPERTY KVASIR_FUZZ_TARGETS ${NAME}_fuzz)
  set_target_properties(${NAME}_fuzz PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
  target_link_options(${NAME}_fuzz PRIVATE -fsanitize=fuzzer)
  target_link_libraries(${NAME}_fuzz PRIVATE ${A_LINK})
endfunction()
