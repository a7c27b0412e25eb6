# kvasir_grpc: gRPC and protobuf, linked statically so that the binary runs
# where no gRPC is installed. Where the archives are missing (some distributions ship only shared
# libraries) the shared ones are used, and the configure step says so.
# kvasir_openssl: the TLS library, the same way.
# KVASIR_PROTOC and KVASIR_GRPC_PLUGIN: the generators.

option(KVASIR_STATIC "Link gRPC, OpenSSL and the C++ runtime statically" ON)

find_package(PkgConfig REQUIRED)
find_program(KVASIR_PROTOC protoc REQUIRED)
find_program(KVASIR_GRPC_PLUGIN grpc_cpp_plugin REQUIRED)
pkg_check_modules(GRPC REQUIRED grpc++>=1.51 protobuf>=3.21)
pkg_check_modules(OPENSSL_PC REQUIRED openssl>=3.0)

# Full paths of the archives behind the library names that pkg-config gives; empty when one is absent.
function(kvasir_archives OUT)
  set(archives "")
  set(missing "")
  list(REMOVE_DUPLICATES ARGN)
  list(REMOVE_ITEM ARGN pthread dl m rt)
  foreach(name ${ARGN})
    find_library(KVASIR_ARCHIVE_${name} NAMES lib${name}.a HINTS ${GRPC_STATIC_LIBRARY_DIRS})
    mark_as_advanced(KVASIR_ARCHIVE_${name})
    if(KVASIR_ARCHIVE_${name})
      list(APPEND archives ${KVASIR_ARCHIVE_${name}})
    elseif(name STREQUAL "atomic")  # belongs to the compiler
      execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libatomic.a OUTPUT_VARIABLE path
                      OUTPUT_STRIP_TRAILING_WHITESPACE)
      list(APPEND archives ${path})
    else()
      list(APPEND missing lib${name}.a)
    endif()
  endforeach()
  if(missing)
    message(STATUS "kvasir: no static ${missing}: linking shared libraries, the binary will need them")
    set(archives "")
  endif()
  set(${OUT} "${archives}" PARENT_SCOPE)
endfunction()

set(grpc_archives "")
set(openssl_archives "")
if(KVASIR_STATIC)
  kvasir_archives(grpc_archives ${GRPC_STATIC_LIBRARIES} atomic)
  kvasir_archives(openssl_archives ssl crypto)
endif()

add_library(kvasir_openssl INTERFACE)
target_include_directories(kvasir_openssl SYSTEM INTERFACE ${OPENSSL_PC_INCLUDE_DIRS})
if(openssl_archives)
  target_link_libraries(kvasir_openssl INTERFACE ${openssl_archives} Threads::Threads ${CMAKE_DL_LIBS})
else()
  target_link_libraries(kvasir_openssl INTERFACE ${OPENSSL_PC_LINK_LIBRARIES} Threads::Threads)
endif()

add_library(kvasir_grpc INTERFACE)
target_include_directories(kvasir_grpc SYSTEM INTERFACE ${GRPC_INCLUDE_DIRS})
if(grpc_archives)
  string(REPLACE ";" "," group "${grpc_archives}")
  target_link_libraries(kvasir_grpc INTERFACE
                        "$<LINK_GROUP:RESCAN,${group}>" kvasir_openssl Threads::Threads ${CMAKE_DL_LIBS} rt)
else()
  target_link_libraries(kvasir_grpc INTERFACE ${GRPC_LINK_LIBRARIES}
                        kvasir_openssl Threads::Threads)
endif()
