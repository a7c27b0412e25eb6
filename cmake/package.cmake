# `cmake --install build/release` and `cd build/release && cpack` (a .deb and a .tar.gz).
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)  # packing builds the program, not the tests
include(GNUInstallDirs)
install(TARGETS kvasir RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT kvasir)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/kvasir/configs COMPONENT kvasir FILES_MATCHING PATTERN "*.json")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright COMPONENT kvasir)
install(FILES README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT kvasir)

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME kvasir)
set(CPACK_PACKAGE_VENDOR "The kvasir authors")
set(CPACK_PACKAGE_CONTACT "The kvasir authors <kvasir@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Continuous-batching inference server for language models")
set(CPACK_PACKAGE_DESCRIPTION
    "kvasir serves a language model to many clients at once, over gRPC and an OpenAI-compatible HTTP interface.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};kvasir;kvasir;/")  # the build's other installs stay out
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_FILE_NAME "kvasir-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}")
# Everything else is inside the binary. The C library is the one of Debian 12, which built it.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6 (>= 2.36)")
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
include(CPack)
