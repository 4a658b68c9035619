# The program (core linked in) and the module for stock LuaJIT, from the same objects.
set(objects "")
foreach(room ${WEFT_ALL_ROOMS})
  list(APPEND objects $<TARGET_OBJECTS:${room}>)
endforeach()
set(libraries ${WEFT_ROOM_LIBRARIES})
list(REMOVE_DUPLICATES libraries)

# What ,help shows of functions in C.
file(GLOB bind_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/bind/lua_*.c)
add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/bind_docs.c
  COMMAND ${CMAKE_COMMAND} -DFOLDER=${CMAKE_SOURCE_DIR}/src/bind -DOUT=${CMAKE_BINARY_DIR}/bind_docs.c
          -P ${CMAKE_SOURCE_DIR}/scripts/cmake/weft_docs.cmake
  DEPENDS ${bind_sources} ${CMAKE_SOURCE_DIR}/scripts/cmake/weft_docs.cmake)
target_sources(weft_bind PRIVATE ${CMAKE_BINARY_DIR}/bind_docs.c)

target_compile_definitions(weft_bind PRIVATE WEFT_SOURCE_LUA="${CMAKE_SOURCE_DIR}/lua" WEFT_VERSION="${PROJECT_VERSION}")

add_executable(weft ${CMAKE_SOURCE_DIR}/src/bind/main.c ${objects})
foreach(room base plan device comm cache model layers bind kernels)
  target_include_directories(weft PRIVATE ${CMAKE_BINARY_DIR}/rooms/${room})
endforeach()
target_link_libraries(weft PRIVATE weft_flags ${libraries} ${LUAJIT_LINK_LIBRARIES} m dl)
set_target_properties(weft PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR} ENABLE_EXPORTS ON)

add_library(weft_core MODULE ${objects})
target_link_libraries(weft_core PRIVATE weft_flags ${libraries} m dl)
target_link_options(weft_core PRIVATE -Wl,-z,nodelete)
set_target_properties(weft_core PROPERTIES PREFIX "" OUTPUT_NAME core
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/weft)

# scripts/fuzz/run builds and runs it.
add_executable(weft_fuzz_safetensors EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/scripts/fuzz/safetensors.c
  $<TARGET_OBJECTS:weft_base> $<TARGET_OBJECTS:weft_model>)
target_include_directories(weft_fuzz_safetensors PRIVATE ${CMAKE_BINARY_DIR}/rooms/base ${CMAKE_BINARY_DIR}/rooms/model)
target_link_libraries(weft_fuzz_safetensors PRIVATE weft_flags ${libraries} m)

install(TARGETS weft RUNTIME DESTINATION bin)
install(TARGETS weft_core LIBRARY DESTINATION lib/lua/5.1/weft)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/lua/ DESTINATION share/weft/lua)
