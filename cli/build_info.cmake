# Writes build_info.h, and touches it only when something changed.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
set(text "#pragma once
#define KVASIR_VERSION \"${VERSION}\"
#define KVASIR_COMMIT \"${commit}\"
#define KVASIR_BUILD_TYPE \"${BUILD_TYPE}\"
#define KVASIR_WITH_CUDA \"${CUDA}\"
")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUT} "${text}")
endif()
