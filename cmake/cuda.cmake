# Turns CUDA on: an installed toolkit first, else the one that tools/cuda-toolkit.sh unpacks.
# The runtime is linked statically and the driver is never linked, so one binary starts with or without
# a GPU; cuBLASLt and NCCL are opened at run time.

set(KVASIR_CUDA_ARCHS "80;90a-real" CACHE STRING
    "Chips to build for: 80 carries PTX too, so later chips without code of their own still run")

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  if(DEFINED ENV{XDG_CACHE_HOME})
    set(unpacked "$ENV{XDG_CACHE_HOME}/kvasir/cuda")
  else()
    set(unpacked "$ENV{HOME}/.cache/kvasir/cuda")
  endif()
  find_program(KVASIR_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
  if(KVASIR_NVCC)
    execute_process(COMMAND ${KVASIR_NVCC} --version OUTPUT_VARIABLE nvcc_says)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${nvcc_says}")
    if(CMAKE_MATCH_1 VERSION_LESS 12.8)
      message(STATUS "kvasir: ${KVASIR_NVCC} is CUDA ${CMAKE_MATCH_1}; 12.8 or newer is needed, looking for another")
      unset(KVASIR_NVCC CACHE)
    endif()
  endif()
  if(NOT KVASIR_NVCC AND EXISTS ${unpacked}/bin/nvcc)
    set(KVASIR_NVCC ${unpacked}/bin/nvcc CACHE FILEPATH "The CUDA compiler" FORCE)
  endif()
  if(NOT KVASIR_NVCC)
    message(FATAL_ERROR "KVASIR_CUDA=ON needs nvcc 12.8 or newer, and none was found. Install a CUDA toolkit, "
                        "or run tools/cuda-toolkit.sh (it fetches 700 MB into ${unpacked}) and configure again.")
  endif()
  set(CMAKE_CUDA_COMPILER ${KVASIR_NVCC})
endif()

set(CMAKE_CUDA_ARCHITECTURES ${KVASIR_CUDA_ARCHS})
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that this nvcc speaks C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
# cuBLASLt's and NCCL's headers, for the types and functions that are looked up at run time.
get_filename_component(KVASIR_CUDA_ROOT ${CMAKE_CUDA_COMPILER} DIRECTORY)
get_filename_component(KVASIR_CUDA_ROOT ${KVASIR_CUDA_ROOT} DIRECTORY)
find_path(KVASIR_CUDA_INCLUDE cuda_runtime.h HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} ${KVASIR_CUDA_ROOT}/include REQUIRED)
find_library(KVASIR_CUDART_STATIC cudart_static HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${KVASIR_CUDA_ROOT}/lib64 REQUIRED)

# For C++ files that call the CUDA runtime.
add_library(kvasir_cudart INTERFACE)
target_include_directories(kvasir_cudart SYSTEM INTERFACE ${KVASIR_CUDA_INCLUDE})
target_link_libraries(kvasir_cudart INTERFACE ${KVASIR_CUDART_STATIC} Threads::Threads ${CMAKE_DL_LIBS} rt)
message(STATUS "kvasir: CUDA ${CMAKE_CUDA_COMPILER_VERSION} from ${KVASIR_CUDA_ROOT} for ${CMAKE_CUDA_ARCHITECTURES}")
