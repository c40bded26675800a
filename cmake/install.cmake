# `cmake --install` and packages: the program, configs, the scripts that users need, and pages.
include(GNUInstallDirs)
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)  # tests need not be built

# Libraries of CUDA are found where they were when it was built, or in NVIDIA's wheels beside that of Parka.
set_target_properties(parka PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
if(SKBUILD AND PARKA_HAVE_CUDA)
  set(wheels $ORIGIN/../../nvidia)
  set_target_properties(parka PROPERTIES
    INSTALL_RPATH "${wheels}/cu${CUDAToolkit_VERSION_MAJOR}/lib;${wheels}/cublas/lib;${wheels}/nccl/lib")
endif()
install(TARGETS parka)

set(shared ${CMAKE_INSTALL_DATADIR}/parka)
install(FILES scripts/completion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME parka)
install(DIRECTORY configs examples DESTINATION ${shared})
# Not those that build, test or measure Parka itself.
install(DIRECTORY scripts DESTINATION ${shared} USE_SOURCE_PERMISSIONS FILES_MATCHING PATTERN "*.py" PATTERN "*.jinja" PATTERN "*.html" PATTERN "requirements.txt"
  PATTERN "launch.sh" PATTERN "research" EXCLUDE PATTERN "__pycache__" EXCLUDE)

set(pages ${CMAKE_INSTALL_DOCDIR})
install(FILES README.md CHANGELOG.md CITATION.cff DESTINATION ${pages})
install(FILES LICENSE DESTINATION ${pages} RENAME copyright)  # where Debian has licences
install(FILES LICENSE DESTINATION ${pages})
install(DIRECTORY docs DESTINATION ${pages} FILES_MATCHING PATTERN "*.md" PATTERN "*.png")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME parka)
set(CPACK_PACKAGE_VENDOR "The Parka authors")
set(CPACK_PACKAGE_CONTACT "The Parka authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "trains language models with FP8 optimizer states and activations")
set(CPACK_PACKAGE_DESCRIPTION "Trains, evaluates and samples from Llama- and OLMo-style language models on CPUs and NVIDIA GPUs,
and predicts the memory of a run without a GPU. Built for ${PARKA_MARCH}.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "python3-venv")  # for the scripts
include(CPack)
