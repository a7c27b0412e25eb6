# `cmake --install build/release` and `cd build/release && cpack` (a .deb and a .tar.gz, each with its checksum).
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)  # packing builds the program, not the tests
include(GNUInstallDirs)
install(TARGETS kvasir RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT kvasir)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/kvasir/configs COMPONENT kvasir FILES_MATCHING PATTERN "*.json")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright COMPONENT kvasir)
install(FILES README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT kvasir)

# What the program says of itself, made when it is installed: manual pages, completions, what it is made of.
set(made ${CMAKE_BINARY_DIR}/package)
install(CODE "execute_process(COMMAND ${CMAKE_SOURCE_DIR}/tools/package-files $<TARGET_FILE:kvasir> ${CMAKE_BINARY_DIR} ${made}
                             COMMAND_ERROR_IS_FATAL ANY)" COMPONENT kvasir)
install(DIRECTORY ${made}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT kvasir)
install(FILES ${made}/kvasir.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kvasir COMPONENT kvasir)
install(FILES ${made}/_kvasir DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions COMPONENT kvasir)
install(FILES ${made}/kvasir.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT kvasir)
install(FILES ${made}/kvasir.cdx.json DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT kvasir OPTIONAL)

# The service, in packages alone: `cmake --install` leaves /etc as it is.
set(service COMPONENT service EXCLUDE_FROM_ALL)
install(FILES deploy/debian/kvasir.service DESTINATION /usr/lib/systemd/system ${service})
install(FILES deploy/debian/sysusers.conf DESTINATION /usr/lib/sysusers.d RENAME kvasir.conf ${service})
install(FILES deploy/debian/kvasir.json DESTINATION /etc/kvasir ${service})
install(FILES deploy/debian/gpu.conf DESTINATION /usr/share/doc/kvasir/examples ${service})

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME kvasir)
set(CPACK_PACKAGE_VENDOR "The kvasir authors")
set(CPACK_PACKAGE_CONTACT "The kvasir authors <kvasir@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Continuous-batching inference server for language models")
set(CPACK_PACKAGE_DESCRIPTION
    "kvasir serves a language model to many clients at once, over gRPC and an OpenAI-compatible HTTP interface.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_SET_DESTDIR ON)  # so that /etc is the package's and not this machine's
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_CMAKE_PROJECTS  # the build's other installs stay out
    "${CMAKE_BINARY_DIR};kvasir;kvasir;/;${CMAKE_BINARY_DIR};kvasir;service;/")
set(CPACK_PACKAGE_CHECKSUM SHA256)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_FILE_NAME "kvasir-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}")
# Everything else is inside the binary. The C library is the one of Debian 12, which built it.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6 (>= 2.36), systemd | passwd")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS ca-certificates)  # for hf:...
set(CPACK_DEBIAN_PACKAGE_SUGGESTS libzmq5)  # for kv_events
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(control ${CMAKE_SOURCE_DIR}/deploy/debian)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${control}/postinst ${control}/prerm ${control}/postrm ${control}/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
